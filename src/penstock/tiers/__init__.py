"""Where bytes live: the tiers, and the table that says which cell is on which."""
