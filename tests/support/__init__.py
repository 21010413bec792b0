"""What the tests share: servers that misbehave, processes, emulators, mutations and fuzzing."""
