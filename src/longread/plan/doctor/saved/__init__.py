"""Facts out of files that were saved on another machine.

Files are hostile until read: every reader has limits on size, depth and number, and none follows a reference.
"""
