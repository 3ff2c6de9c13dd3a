"""Tables that TorchRec shards, or that replicas keep together by the rows they changed."""
