"""Where a prefix is resident, or will be soon: digests as bit planes, and promises."""
