"""One request, one replica: what each would cost, which is taken, what is reserved."""
