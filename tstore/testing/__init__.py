"""What tests of tstore, and of things built on it, need: a realistic model to save, and more to come."""
