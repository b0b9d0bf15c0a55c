-- What does it cost to publish: bytes of every version, and their share of the whole state?
SELECT lineage, version, kind, coder, base_version, reverts_to, stored_bytes, full_bytes,
  stored_bytes / nullif(full_bytes, 0) AS share, changed_elements / nullif(total_elements, 0) AS changed, published_us
FROM weight_versions
ORDER BY lineage, version;
