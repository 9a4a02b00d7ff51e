"""Other engines: each a script for the interpreter that has it; nothing of ours is imported."""
