"""The engine's use of the tiers below its device: loading before it computes, writing out after."""
