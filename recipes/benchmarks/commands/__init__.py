"""The commands of benchmarks that are a file each: their options, and what is imported only once it is asked for."""
