"""Weight versions: published as anchors and deltas, found by their events, verified, staged for a swap."""
