"""Requests and chunks a second through a gateway on one core, and what each costs it."""
