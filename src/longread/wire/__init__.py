"""What crosses HTTP and the tokenizer: OpenAI's wire and DeepSeek's markup. Knows no server, engine or tensors."""
