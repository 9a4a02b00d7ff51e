"""LoRA adapters: what they add to the model's products, and which of them are in memory."""
