"""What the tests share: how long hypothesis looks for faults."""

from hypothesis import settings

settings.register_profile("long", max_examples=20_000)
