"""AsyncAPI: the topic catalogue as a document that other people's tools read, and its check by AsyncAPI's own parser."""
