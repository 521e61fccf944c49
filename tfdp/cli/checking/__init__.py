"""What `tfdp validate` is made of: finding specs, keeping answers, printing findings in the formats of other tools."""
