"""The Avro schemas, one file a topic and version. Released ones are frozen."""
