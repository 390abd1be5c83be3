"""Quality gates over plain HTTP: is this server's output the same as it was, or as another's, and how sure is that?"""
