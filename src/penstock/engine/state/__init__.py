"""State looked at, changed, moved between tiers, saved and loaded."""
