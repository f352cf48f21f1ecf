"""``swarm api`` on local servers, asked by the clients of others: OpenAI's and Tinker's."""
