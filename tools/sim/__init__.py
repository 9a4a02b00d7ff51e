"""A cluster that exists only in time: the real router and the real scheduler, a computed device."""
