"""The live page: what the bus says, as one document without a build step or an outside host."""
