"""Results compared and shown: two runs against each other, and any number of them on one page."""
