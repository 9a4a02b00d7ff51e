"""One engine replica: front, scheduler, cache, runner, publishing."""
