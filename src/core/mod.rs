//! The part that decides, pure: no sockets, no clock, no runtime, no metrics registry. `now` and randomness are arguments.
//!
//! In the order of a decision: [`prompt`] reads the request body, [`blocks`] chains its bytes into hashes, [`index`]
//! tells who is believed to hold them, [`cache`] is what one worker is believed to hold, [`load`] is what it has been given to do and [`speed`] how fast it does it, [`price`] turns all that into seconds,
//! `slot` keeps what is known of one worker together, `view` is one request's look at all of it, [`planner`] picks, [`booking`] is the claim of one request on the picked worker,
//! `homes` is what routers agree on without a word, [`elsewhere`] what they make of each other's words, and [`trust`] is what the answers say of the beliefs. [`shadow`] plays the same traffic under the policy that it does not go by.

pub mod blocks;
pub mod booking;
pub mod cache;
pub mod decision;
pub mod elsewhere;
mod homes;
pub mod ids;
pub mod index;
pub mod load;
pub mod planner;
pub mod price;
pub mod prompt;
pub mod shadow;
mod slot;
pub mod speed;
pub mod tally;
pub mod trust;
mod view;
