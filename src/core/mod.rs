//! The part that decides, pure: no sockets, no clock, no runtime, no metrics registry. `now` and randomness are arguments.
//!
//! In the order of a decision: [`prompt`] reads the request body, [`blocks`] chains its bytes into hashes, [`index`]
//! tells who is believed to hold them, [`cache`] is what one worker is believed to hold, [`load`] is what it has been
//! given to do, [`price`] turns all that into seconds, and [`planner`] picks and books.

pub mod blocks;
pub mod cache;
pub mod ids;
pub mod index;
pub mod load;
pub mod planner;
pub mod price;
pub mod prompt;
