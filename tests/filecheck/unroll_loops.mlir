// RUN: %opt %s -p 'unroll-loops{limit=4}' | %filecheck %s

// A loop of two stores becomes straight code, one of five is beyond the limit and stays, and so does
// one whose bounds are not constants.

func.func @loop(%start: i64, %stop: i64, %y: memref<?xf64>) {
  %value = arith.constant 1.0 : f64
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %c5 = arith.constant 5 : index
  %end = arith.index_cast %stop : i64 to index
  scf.for %short = %c0 to %c2 step %c1 {
    memref.store %value, %y[%short] : memref<?xf64>
  }
  scf.for %long = %c0 to %c5 step %c1 {
    memref.store %value, %y[%long] : memref<?xf64>
  }
  scf.for %dynamic = %c0 to %end step %c1 {
    memref.store %value, %y[%dynamic] : memref<?xf64>
  }
  func.return
}

// CHECK:       %end = arith.index_cast %stop : i64 to index
// CHECK-NEXT:  %[[FIRST:.*]] = arith.constant 0 : index
// CHECK-NEXT:  memref.store %value, %y[%[[FIRST]]] : memref<?xf64>
// CHECK-NEXT:  %[[SECOND:.*]] = arith.constant 1 : index
// CHECK-NEXT:  memref.store %value, %y[%[[SECOND]]] : memref<?xf64>
// CHECK-NEXT:  scf.for %long = %c0 to %c5 step %c1 {
// CHECK-NEXT:    memref.store %value, %y[%long] : memref<?xf64>
// CHECK-NEXT:  }
// CHECK-NEXT:  scf.for %dynamic = %c0 to %end step %c1 {
// CHECK-NEXT:    memref.store %value, %y[%dynamic] : memref<?xf64>
// CHECK-NEXT:  }
