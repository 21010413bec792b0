"""The parts of quantizing a checkpoint: what each array gets, how it is encoded anew, and what that cost."""
