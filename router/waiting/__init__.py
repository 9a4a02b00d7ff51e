"""Where requests wait, whose turn it is, and what each stage holds."""
