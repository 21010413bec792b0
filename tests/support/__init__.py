"""Support for tests: misbehaving servers, processes, emulators, mutations and fuzzing."""
