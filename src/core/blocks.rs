//! From canonical prompt bytes to a chain of block hashes. A block is a fixed run of canonical bytes; its hash covers
//! everything before it too, so equal hashes mean equal prefixes. Keyed blake3, truncated to 64 bits: a collision can at
//! worst route a request to the wrong worker, and nobody outside can make one without the key.

use std::sync::Arc;

use crate::core::ids::BlockHash;

/// Canonical bytes in a block by default: about 64 tokens of English, four blocks of vLLM's default 16.
pub const DEFAULT_BLOCK_BYTES: usize = 256;

/// The secret under which blocks are hashed: random per process, or shared by replicas through the config.
#[derive(Clone)]
pub struct HashKey(pub [u8; 32]);

/// The hashes of a prompt's full blocks, in order, and how many canonical bytes it had in all.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    pub hashes: Arc<[BlockHash]>,
    pub bytes: u64,
}

impl Chain {
    /// The chain of a request whose prompt cannot be read: it matches nothing.
    pub fn empty() -> Chain {
        Chain::default()
    }
}

/// Builds a [`Chain`] from canonical bytes that arrive in pieces of any size.
pub struct ChainBuilder {
    key: HashKey,
    block_bytes: usize,
    parent: [u8; 32],
    pending: Vec<u8>,
    hashes: Vec<BlockHash>,
    bytes: u64,
}

impl ChainBuilder {
    /// `namespace` roots the chain: prompts in different namespaces share no block.
    pub fn new(key: &HashKey, block_bytes: usize, namespace: &[u8]) -> ChainBuilder {
        let parent = *blake3::keyed_hash(&key.0, namespace).as_bytes();
        ChainBuilder {
            key: key.clone(),
            block_bytes: block_bytes.max(1),
            parent,
            pending: Vec::with_capacity(block_bytes),
            hashes: Vec::new(),
            bytes: 0,
        }
    }

    pub fn update(&mut self, mut piece: &[u8]) {
        self.bytes += piece.len() as u64;
        while !piece.is_empty() {
            let room = self.block_bytes - self.pending.len();
            let (now, later) = piece.split_at(room.min(piece.len()));
            self.pending.extend_from_slice(now);
            piece = later;
            if self.pending.len() == self.block_bytes {
                self.close_block();
            }
        }
    }

    fn close_block(&mut self) {
        let mut hasher = blake3::Hasher::new_keyed(&self.key.0);
        hasher.update(&self.parent);
        hasher.update(&self.pending);
        self.parent = *hasher.finalize().as_bytes();
        self.pending.clear();
        let mut low = [0; 8];
        low.copy_from_slice(&self.parent[..8]);
        self.hashes.push(BlockHash(u64::from_le_bytes(low)));
    }

    /// The chain of all full blocks; a partial block at the end has no hash, as in vLLM.
    pub fn finish(self) -> Chain {
        Chain { hashes: self.hashes.into(), bytes: self.bytes }
    }
}
