"""Other engines that are compared with. transformers stands in the package (dsbd_cli.lab.peers)."""
