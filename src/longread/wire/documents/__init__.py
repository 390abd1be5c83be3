"""Documents: from files to texts, and from a text to the prompt prefix that a conversation about it begins with."""
