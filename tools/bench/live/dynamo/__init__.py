"""NVIDIA Dynamo's frontend as a peer: the model as it reads one, and workers before our servers."""
