"""The same open-loop traffic for several live servers in turn: ours, peers, any OpenAI URL."""
