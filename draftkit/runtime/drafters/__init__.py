"""The drafters: one file each, all with the protocol of `draftkit.runtime.drafters.protocol`."""
