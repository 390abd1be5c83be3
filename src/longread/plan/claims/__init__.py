"""Whether what somebody says of speed or capacity can be true: floors, conditions, and what would settle it.

``text`` reads a sentence, ``judge`` holds it against arithmetic and predictions, ``report`` shows the result.
"""
