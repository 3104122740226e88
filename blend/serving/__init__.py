"""Many requests at once: one thread computes, in passes that requests share."""
