"""Hot heads: found, and brought to more replicas before requests must compute them there."""
