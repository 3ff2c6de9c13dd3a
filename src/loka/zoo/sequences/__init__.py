"""Models that read histories themselves: attention, gates and scans over them."""
