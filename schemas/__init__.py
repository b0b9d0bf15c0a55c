"""What an event is: schemas, topic catalogue, codec, ids, errors, reasons, metric names. Imports nothing of ours."""
