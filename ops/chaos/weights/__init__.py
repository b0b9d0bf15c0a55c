"""The crash matrix of the weight plane: who publishes and who follows dies at every effect, and the store breaks its word."""
