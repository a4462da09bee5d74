//! `Debug` for trait objects: the name of the trait.
//!
//! Not a supertrait `Debug`: the table of functions of each implementation would then refer to the `Debug` code of all
//! its fields, and so keep half a megabyte in the binary that nothing calls.

use std::fmt;

use crate::colocate::ColocatePort;
use crate::mover::Host;
use crate::operator::OperatorPort;
use crate::tap::Tap;

macro_rules! named {
    ($($name:ident),*) => {
        $(impl fmt::Debug for dyn $name + '_ {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(stringify!($name))
            }
        })*
    };
}

named!(ColocatePort, Host, OperatorPort, Tap);
