"""Ctrl-C at every moment of a call, as code for a process that a test starts."""

from __future__ import annotations

AT_EVERY_MOMENT = """
    import sys

    def interrupted_at_every_moment(call):
        # at the first moment, then at the second, until the call ends by itself; return their number
        def interrupt(frame, event, argument):  # where Python handles signals
            nonlocal left
            if event in ("call", "c_return"):
                left -= 1
                if not left:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        for moment in range(1, 1000):
            left = moment
            sys.setprofile(interrupt)
            try:
                call()
            except KeyboardInterrupt:
                continue
            finally:
                sys.setprofile(None)
            break
        return moment
"""
