"""`warmroute doctor`: what this machine lacks, what a running cluster worries about, what fits."""
