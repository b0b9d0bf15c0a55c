"""What serves weights: a Protocol and its implementations (arrays, a torch module, a safetensors folder, engines over HTTP)."""
