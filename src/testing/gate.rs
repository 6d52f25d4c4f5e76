//! A gate that a test opens when it has seen what it wanted to see.

use tokio::sync::watch;

/// Closed until opened, then open for ever. Clones are the same gate.
#[derive(Clone, Debug)]
pub struct Gate {
    open: watch::Sender<bool>,
}

impl Default for Gate {
    fn default() -> Self {
        Gate { open: watch::Sender::new(false) }
    }
}

impl Gate {
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    pub async fn passed(&self) {
        let mut open = self.open.subscribe();
        // The sender is ourselves, so it cannot be gone.
        let _ = open.wait_for(|open| *open).await;
    }
}
