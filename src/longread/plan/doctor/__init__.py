"""What a machine is and what is wrong with it, for serving long contexts.

Readers fill ``facts`` (of this machine, or of files saved on another); checks turn facts into ``finding``s and read
nothing themselves. Nothing here changes a setting, and nothing imports torch.
"""
