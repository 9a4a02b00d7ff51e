"""The book of standard simulations: every policy on the same traces, from its own figures."""
