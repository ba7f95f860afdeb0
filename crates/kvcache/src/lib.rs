//! kvcache
