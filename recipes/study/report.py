"""What a study found: one record of all figures, a verdict on each claim, and tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recipes.study.arms import CLAIMS, Claim, Plan
from recipes.study.corpus import CorpusFacts
from recipes.study.intervals import Interval, t_interval
from recipes.study.training import Place
from recipes.study.verdicts import Finding, finding, plus_minus, with_limits
from recipes.study import words
from recipes.study.markdown import markdown_table

SHOWN = "shown"
NOT_SHOWN = "not shown"
OPPOSITE = "not shown; the opposite was measured"
TOO_FEW = "not shown; too few seeds"
MISSING = "not run"
_WORDS = {
    Finding.SHOWN: SHOWN,
    Finding.NOT_SHOWN: NOT_SHOWN,
    Finding.OPPOSITE: OPPOSITE,
    Finding.TOO_FEW: TOO_FEW,
}


@dataclass(frozen=True)
class Outcome:
    """A claim and what the runs say about it, over paired seeds; None without runs."""

    claim: Claim
    difference: Interval | None
    """Loss of the other arm minus loss of the arm that the claim prefers, nats per byte."""
    evidence: Interval | None
    """What the claim says is positive; the difference itself unless the claim has a baseline."""

    @property
    def verdict(self) -> str:
        """``shown`` only if the whole interval supports the claim."""
        return MISSING if self.evidence is None else _WORDS[finding(self.evidence)]


def judge(claim: Claim, losses: Mapping[str, Mapping[str, float]]) -> Outcome:
    """Compares the arms of a claim on the seeds that all of them have finished.

    Args:
        claim: The claim.
        losses: Held-out losses by arm and seed.
    """
    seeds = sorted(set.intersection(*(set(losses.get(arm, ())) for arm in claim.arms)))
    if not seeds:
        return Outcome(claim, None, None)
    paired = [{arm: losses[arm][seed] for arm in claim.arms} for seed in seeds]
    return Outcome(
        claim, t_interval(list(map(claim.difference, paired))), t_interval(list(map(claim.evidence, paired)))
    )


def collect(
    plan: Plan, seeds: Sequence[int], corpus: CorpusFacts, place: Place, asked: Collection[str] | None = None
) -> dict[str, Any]:
    """Returns the figures of all finished runs as plain data, and names those that are missing.

    Args:
        plan: The study.
        seeds: Its seeds.
        corpus: Its text.
        place: Where its runs are.
        asked: The arms that it has. None: all.
    """
    arms: dict[str, Any] = {}
    missing = []
    for seed in seeds:
        for arm, run in plan.runs(seed, corpus.digest).items():
            if asked is not None and arm not in asked:
                continue
            found = place.result(run)
            if found is None:
                missing.append(f"{arm}, seed {seed}")
                continue
            entry = arms.setdefault(
                arm,
                {"experts": run.shape.experts, "width": run.shape.width, "parameters": found["parameters"]}
                | {"losses": {}, "curves": {}, "cpu_s": {}, "tokens": found["tokens"], "versions": found["versions"]},
            )
            entry["losses"][str(seed)] = found["loss"]
            entry["curves"][str(seed)] = found["curve"]
            entry["cpu_s"][str(seed)] = found["cpu_s"]
    return {"plan": asdict(plan), "corpus": asdict(corpus), "seeds": list(seeds), "missing": missing, "arms": arms}


def outcomes(figures: Mapping[str, Any]) -> list[Outcome]:
    """Returns the verdict on every claim about arms that the study has."""
    losses = {arm: entry["losses"] for arm, entry in figures["arms"].items()}
    return [judge(claim, losses) for claim in _about(figures, CLAIMS)]


def word_outcomes(figures: Mapping[str, Any]) -> list[Outcome]:
    """Returns the verdict on every claim about last words; differences are in percentage points."""
    missed = words.missed(figures["words"])
    return [judge(claim, missed) for claim in _about(figures, words.CLAIMS)]


def _about(figures: Mapping[str, Any], claims: Sequence[Claim]) -> list[Claim]:
    arms = {name.partition(", seed")[0] for name in figures["missing"]}.union(figures["arms"])
    return [claim for claim in claims if arms.issuperset(claim.arms)]


def as_markdown(figures: Mapping[str, Any]) -> str:
    """Returns the tables of the report: budget, claims, arms, last words and costs."""
    parts = [_budget(figures), _claims(outcomes(figures)), _arms(figures)]
    if "words" in figures:
        parts += [_words(figures), _claims(word_outcomes(figures), digits=2)]
    if "cost" in figures:
        parts.append(_costs(figures))
    return "\n\n".join(parts) + "\n"


def _budget(figures: Mapping[str, Any]) -> str:
    arms, corpus, training = figures["arms"], figures["corpus"], figures["plan"]["training"]
    cpu_h = sum(sum(entry["cpu_s"].values()) for entry in arms.values()) / 3600
    num_runs = sum(len(entry["losses"]) for entry in arms.values())
    tokens = training["steps"] * training["rows"] * training["length"]
    megabytes = corpus["train_bytes"] * tokens / corpus["train_tokens"] / 1e6
    rows = [
        ("runs", f"{num_runs} ({len(arms)} arms, seeds {', '.join(map(str, figures['seeds']))})"),
        ("runs missing", "; ".join(figures["missing"]) or "none"),
        (
            "a run",
            f"{training['steps']} steps of {training['rows']} x {training['length']} tokens: "
            f"{tokens / 1e6:.2f} million tokens, {megabytes:.1f} MB of text",
        ),
        ("training time", f"{cpu_h:.2f} CPU hours"),
        (
            "text",
            f"{corpus['train_files']} files, {corpus['train_bytes'] / 1e6:.1f} MB; held out: "
            f"{corpus['held_out_files']} files, {corpus['held_out_bytes'] / 1e6:.2f} MB",
        ),
        ("machine", figures.get("machine", "not recorded")),
    ]
    if "cost" in figures:
        how = figures["cost"]["how"]
        text = (
            f"medians of {how['rounds']} rounds in turns, one thread; {how['tokens']} tokens after a prompt of "
            f"{how['prompt_tokens']}; batch of 1, then of {how['rows']}; load average of the machine "
            f"{how['load_before']:.1f} before, {how['load_after']:.1f} after"
        )
        rows.append(("cost", text))
    return markdown_table(("budget", ""), rows)


def _claims(found: Sequence[Outcome], digits: int = 4) -> str:
    rows = [
        (
            one.claim.name,
            f"section {one.claim.source}",
            _with_range(one.difference, digits),
            _with_range(one.evidence, digits) if one.claim.baseline else "the same",
            0 if one.evidence is None else one.evidence.count,
            f"**{one.verdict}**" if one.verdict == SHOWN else one.verdict,
        )
        for one in found
    ]
    return markdown_table(("claim", "paper", "difference", "judged", "seeds", "verdict"), rows)


def _arms(figures: Mapping[str, Any]) -> str:
    rows = []
    for arm, entry in figures["arms"].items():
        losses = list(entry["losses"].values())
        cpu = sum(entry["cpu_s"].values()) / len(entry["cpu_s"])
        experts = "-".join(map(str, entry["experts"]))
        size = f"{entry['parameters'] / 1e6:.2f} M"
        limits = f"{min(losses):.4f} to {max(losses):.4f}"
        rows.append((arm, experts, entry["width"], size, plus_minus(losses), limits, len(losses), f"{cpu:.0f}"))
    heads = ("arm", "experts by layer", "width", "parameters", "loss", "lowest to highest", "seeds", "CPU s a run")
    return markdown_table(heads, rows)


def _words(figures: Mapping[str, Any]) -> str:
    rows = []
    for arm, by_seed in figures["words"]["arms"].items():
        shares = [100 * share for share in by_seed.values()]
        limits = f"{min(shares):.2f} to {max(shares):.2f} %"
        rows.append((arm, f"{plus_minus(shares, digits=2)} %", limits, len(shares)))
    return markdown_table(("arm", "last words", "lowest to highest", "seeds"), rows)


def _costs(figures: Mapping[str, Any]) -> str:
    rows = [
        (arm, f"{one['loss']:.4f}", f"{one['parameters'] / 1e6:.2f} M", *_speeds(one))
        for arm, one in figures["cost"]["arms"].items()
    ]
    rows += [
        (f"dense at the loss of {arm}", f"{one['loss']:.4f}", f"{one['parameters'] / 1e6:.2f} M", *_speeds(one))
        if one["parameters"]
        else (f"dense at the loss of {arm}", f"{one['loss']:.4f}", "outside the sizes trained", "-", "-", "-", "-")
        for arm, one in figures["cost"]["dense_at_equal_loss"].items()
    ]
    heads = ("model", "loss", "parameters", "decode, ms/token", "CPU ms", "batched, tokens/s", "tokens/CPU s")
    return markdown_table(heads, rows)


def _speeds(one: Mapping[str, float]) -> tuple[str, str, str, str]:
    return (
        f"{one['latency_s'] * 1e3:.2f}",
        f"{one['latency_cpu_s'] * 1e3:.2f}",
        f"{one['tokens_per_s']:.0f}",
        f"{one['tokens_per_cpu_s']:.0f}",
    )


def _with_range(interval: Interval | None, digits: int) -> str:
    return "-" if interval is None else with_limits(interval, digits=digits)
