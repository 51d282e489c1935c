"""Between outside agents and the engines: sessions with exact tokens behind OpenAI's API, and SMG in front of the replicas."""
