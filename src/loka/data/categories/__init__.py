"""From strings to ids: columns, hashes, vocabularies."""
