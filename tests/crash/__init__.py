"""Real processes that die, stand still or are cut off at each fail point, in every pool and on both brokers."""
