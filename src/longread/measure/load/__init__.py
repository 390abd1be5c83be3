"""The load client: requests against any OpenAI-compatible server, timed, counted and written down."""
